"""Preparing and unpreparing claims."""

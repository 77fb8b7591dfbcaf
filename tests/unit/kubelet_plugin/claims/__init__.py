"""Unit tests of preparing and unpreparing claims."""

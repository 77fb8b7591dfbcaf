"""Curation: the choice of the devices that the cluster offers."""

"""The container image, from Debian packages and wheels: ``recipe`` is what a Dockerfile and ``make image`` share."""

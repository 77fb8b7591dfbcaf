"""The cluster-wide controller: decides what is offered. Not built yet; node plugins stand alone without it."""

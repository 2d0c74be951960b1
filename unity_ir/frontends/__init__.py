"""Frontends: models written for other systems as graphs. Each needs the system it reads from."""

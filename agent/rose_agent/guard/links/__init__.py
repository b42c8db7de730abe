"""Connections to the node's neighbours: tap, engine host, routers, sandbox host."""

"""Engines on the other side of the wire: a simulated one here, the publisher inside real ones later."""

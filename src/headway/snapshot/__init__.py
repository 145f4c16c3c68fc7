"""How an engine's state travels to the router: a versioned codec and its transports."""

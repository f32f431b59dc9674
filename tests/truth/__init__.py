"""Models built by hand whose circuits are known, because nothing else is in them."""

"""The same function written with other weights has the same circuits, up to renaming."""

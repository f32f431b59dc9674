"""Figures: one function each, drawn in one house style."""

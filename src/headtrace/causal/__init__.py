"""causal"""

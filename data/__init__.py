"""Texts, the target model, and its hidden states: everything that a head learns from."""

"""Measure and draw how language models change over training and across scales."""

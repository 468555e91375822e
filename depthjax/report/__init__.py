"""Figures that a person looks at: one page, and beside it a PNG and a CSV of every figure.

Needs the extra `plots`.
"""

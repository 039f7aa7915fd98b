"""Policies side by side on the real engine: the same requests, one after another through each.

Nothing here knows a terminal.
"""

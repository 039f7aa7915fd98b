"""Workloads: what is asked, and when, drawn from a seed or read from a trace.

Token ids are made up; nothing here knows a model or a tokenizer.
"""

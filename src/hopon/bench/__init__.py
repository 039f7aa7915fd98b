"""The load generator: plays a schedule of requests to an OpenAI-compatible server and tells what clients saw.

``schedule`` says what is asked and when, ``play`` sends it, ``records`` are what came of it, ``summary`` folds them.
Nothing here knows a model or an engine; a server is an address.
"""

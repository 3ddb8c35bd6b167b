"""Engines: the protocol that the loop knows, and llama.cpp behind it.

The modules of this package are the only ones that import llama_cpp.
"""

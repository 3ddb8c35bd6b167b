"""llama.cpp: weights, contexts, sequences, devices, servers and tools.

Only the modules of this package import llama_cpp.
"""

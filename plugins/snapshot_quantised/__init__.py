"""Quantised weights of bitsandbytes, GPTQ and AWQ, read as full ones."""

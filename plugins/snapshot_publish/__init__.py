"""Published weights: versions for inference engines, with vLLM and verl."""

"""The writer process of asynchronous takes."""

"""S3, Google Cloud Storage, Azure, and HTTP."""

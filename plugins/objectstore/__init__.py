"""Object stores: S3, Google Cloud Storage, Azure Blob Storage, and their shared parts."""

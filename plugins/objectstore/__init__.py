"""Object stores: S3, Google Cloud Storage, Azure Blob Storage, and what they have in common."""

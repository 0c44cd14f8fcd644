"""What fsspec knows: SFTP, WebDAV, Hugging Face, archives, caches, and chains of them."""

"""File systems of fsspec: SFTP, WebDAV, Hugging Face, archives, caches, and chains of them."""

"""Model families whose bridge mbridge lacks or has wrong, and how a directory is read. Importing
one registers it."""

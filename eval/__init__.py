"""The lossless tree decoder, and what it measures."""

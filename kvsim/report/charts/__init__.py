"""Small frame -> chart, one module per question; no chart reads a file or configures itself."""

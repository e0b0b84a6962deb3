"""What is looked at: figures for papers and notebooks, a page, a live view."""

"""What a loader's worker does with an image once it is decoded; and images that are drawn, without a file."""

"""A table or a folder of images with captions as indexed WebDataset shards."""

"""The model: OpenCLIP's architectures and parameter names, dropout that belongs to the sample, conversion."""

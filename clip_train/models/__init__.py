"""The model: OpenCLIP's architectures and parameter names, counter-based dropout, conversion."""

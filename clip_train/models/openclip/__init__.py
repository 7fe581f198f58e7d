"""Models that OpenCLIP builds. They need `pip install 'clip-train[openclip]'`."""

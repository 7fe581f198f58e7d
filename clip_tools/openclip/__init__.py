"""An OpenCLIP command line as a recipe. Nothing of OpenCLIP is imported."""

"""Example recipes; `clip-train demo` trains demo_shapes.yaml or demo_digits.yaml."""

"""Example recipes; `clip-train demo` trains demo_shapes.yaml."""

"""The SeZM (DPA4) potential: one file for each subject of the model."""

"""fedloom against other simulators of federated learning."""

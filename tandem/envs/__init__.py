"""What users write: tasks, the agent loop, tools and rewards. No tensors, no inference, no sandbox backend."""

"""Plans on several tasks, the steps that run them, and the values between their partitions."""

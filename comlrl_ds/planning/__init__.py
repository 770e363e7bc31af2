"""What a run would do and cost: groups, roles, weight edges, memory. Answers without torch, in a second."""

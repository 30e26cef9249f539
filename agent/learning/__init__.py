"""Learning from what became of the pods: experience, rewards, PPO, DQN and the gate."""

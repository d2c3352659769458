"""Re-score stored rollouts and re-estimate their advantages as a new branch."""

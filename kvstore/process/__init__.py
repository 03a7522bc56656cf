"""What every process of ours needs: tasks and threads that do not end unseen, children, logs."""

"""What fedsched relies on in kube-scheduler, asked of the real one."""

class _Cpu:
    def is_cpu(self) -> bool:
        return True


current_platform = _Cpu()

#pragma once

namespace torch_convfix {

// Where a loaded ELF library keeps the address of a function that it imports from another. Calls pass
// through it, so that what is written there is called in the function's place.
class ImportSlot {
 public:
  // By a part of the library's file name and the function's mangled name.
  ImportSlot(const char* library, const char* function);

  explicit operator bool() const {
    return address_ != nullptr;
  }
  void* get() const;
  void set(void* function) const;

 private:
  void** address_ = nullptr;
  bool read_only_ = false;  // the loader protects it once it has resolved it (RELRO)
};

}  // namespace torch_convfix

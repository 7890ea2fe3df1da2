#include "graph_hash/import_slot.h"

#include <c10/util/Exception.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <string_view>

namespace torch_convfix {
namespace {

struct Search {
  const char* file;
  std::string_view function;
  void** address = nullptr;
  bool read_only = false;
};

// The tables of one library's dynamic section that say what it imports, and where.
struct Imports {
  const ElfW(Sym) * symbols = nullptr;
  const char* names = nullptr;
  const ElfW(Rela) * called = nullptr;  // through the procedure linkage table
  size_t called_bytes = 0;
  const ElfW(Rela) * other = nullptr;
  size_t other_bytes = 0;

  explicit Imports(const ElfW(Dyn) * entry) {
    for (; entry->d_tag != DT_NULL; ++entry) {
      switch (entry->d_tag) {
        case DT_SYMTAB:
          symbols = reinterpret_cast<const ElfW(Sym)*>(entry->d_un.d_ptr);
          break;
        case DT_STRTAB:
          names = reinterpret_cast<const char*>(entry->d_un.d_ptr);
          break;
        case DT_JMPREL:
          called = reinterpret_cast<const ElfW(Rela)*>(entry->d_un.d_ptr);
          break;
        case DT_PLTRELSZ:
          called_bytes = entry->d_un.d_val;
          break;
        case DT_RELA:
          other = reinterpret_cast<const ElfW(Rela)*>(entry->d_un.d_ptr);
          break;
        case DT_RELASZ:
          other_bytes = entry->d_un.d_val;
          break;
      }
    }
  }

  const ElfW(Rela) * find(std::string_view function, const ElfW(Rela) * table, size_t bytes) const {
    for (auto* r = table; r != table + bytes / sizeof(*table); ++r) {
      const auto symbol = ELF64_R_SYM(r->r_info);
      if (symbol != 0 && function == names + symbols[symbol].st_name) {
        return r;
      }
    }
    return nullptr;
  }

  const ElfW(Rela) * find(std::string_view function) const {
    const auto* found = find(function, called, called_bytes);
    return found != nullptr ? found : find(function, other, other_bytes);
  }
};

int search_library(dl_phdr_info* info, size_t, void* data) {
  auto& search = *static_cast<Search*>(data);
  if (std::strstr(info->dlpi_name, search.file) == nullptr) {
    return 0;
  }
  const ElfW(Phdr)* relro = nullptr;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    if (header.p_type == PT_GNU_RELRO) {
      relro = &header;
    } else if (header.p_type == PT_DYNAMIC) {
      const Imports imports(reinterpret_cast<const ElfW(Dyn)*>(info->dlpi_addr + header.p_vaddr));
      if (const auto* found = imports.find(search.function)) {
        search.address = reinterpret_cast<void**>(info->dlpi_addr + found->r_offset);
      }
    }
  }
  if (search.address != nullptr && relro != nullptr) {
    const auto offset = reinterpret_cast<ElfW(Addr)>(search.address) - info->dlpi_addr;
    search.read_only = relro->p_vaddr <= offset && offset < relro->p_vaddr + relro->p_memsz;
  }
  return 1;
}

}  // namespace

ImportSlot::ImportSlot(const char* library, const char* function) {
  Search search{library, function};
  dl_iterate_phdr(search_library, &search);
  address_ = search.address;
  read_only_ = search.read_only;
}

void* ImportSlot::get() const {
  return std::atomic_ref(*address_).load();
}

void ImportSlot::set(void* function) const {
  const auto size = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  auto* const page = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(address_) / size * size);
  const auto protect = [&](int protection) {
    TORCH_CHECK(
        mprotect(page, size, protection) == 0, "graph hash: mprotect failed: ", std::strerror(errno));
  };
  if (read_only_) {
    protect(PROT_READ | PROT_WRITE);
  }
  std::atomic_ref(*address_).store(function);
  if (read_only_) {
    protect(PROT_READ);
  }
}

}  // namespace torch_convfix

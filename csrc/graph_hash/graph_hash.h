#pragma once

#include "graph_hash/import_slot.h"

namespace torch_convfix {

// torch_xla's hash of a graph knows the operators above each result, and the parameters in the order in
// which they are first met; not which of two alike nodes is an operand. cat([x, x, y]) and
// cat([x, y, y]) have one hash, and the second to be compiled runs the program of the first. For as long
// as this lives, the hash also knows for every result which parameter stands where.
class GraphHashMend {
 public:
  GraphHashMend();
  ~GraphHashMend();
  GraphHashMend(const GraphHashMend&) = delete;
  GraphHashMend& operator=(const GraphHashMend&) = delete;

  // Whether this torch_xla has the place where it can be done.
  explicit operator bool() const {
    return static_cast<bool>(slot_);
  }

 private:
  ImportSlot slot_;
};

}  // namespace torch_convfix

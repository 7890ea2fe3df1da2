#include "graph_hash/graph_hash.h"

#include <c10/util/flat_hash_map.h>
#include <torch/csrc/lazy/backend/backend_interface.h>
#include <torch/csrc/lazy/core/lazy_graph_executor.h>

namespace torch_convfix {
namespace {

using torch::lazy::hash_t;

struct Executor : torch::lazy::LazyGraphExecutor {
  // The member function, as the ABI calls it.
  using RunPostOrder =
      PostOrderData(LazyGraphExecutor*, const std::vector<torch::lazy::Value>&, SyncTensorCollection*);

  static inline RunPostOrder* stock = nullptr;

  // The results as functions of the numbered parameters: each node's hash, which covers the operators
  // above it, with its operands' hashes, and a parameter's number in place of its.
  static hash_t results_hash(
      const std::vector<torch::lazy::Value>& results, const PostOrderData& graph) {
    ska::flat_hash_map<const torch::lazy::Node*, hash_t> hashes(graph.post_order.size());
    const auto* const backend = torch::lazy::getBackend();
    auto number = graph.parameter_sequence.begin();
    for (const auto* node : graph.post_order) {
      const auto& operands = node->operands();
      auto hash = node->hash();
      if (operands.empty() && backend->GetComputationDataFromNode(node)) {
        hash = torch::lazy::Hash(*number++);
      }
      for (const auto& operand : operands) {
        hash = torch::lazy::HashCombine(hash, hashes.at(operand.node));
      }
      hashes.emplace(node, hash);
    }
    hash_t all = 0;
    for (const auto& result : results) {
      all = torch::lazy::HashCombine(all, hashes.at(result.node.get()));
    }
    return all;
  }

  static PostOrderData run_post_order(
      LazyGraphExecutor* self,
      const std::vector<torch::lazy::Value>& results,
      SyncTensorCollection* tensors) {
    auto graph = stock(self, results, tensors);
    if (graph.parameters_data.size() > 1) {  // else nothing can be taken for another
      tensors->hash = torch::lazy::HashCombine(tensors->hash, results_hash(results, graph));
    }
    return graph;
  }
};

constexpr auto kRunPostOrder =
    "_ZN5torch4lazy17LazyGraphExecutor12RunPostOrder"
    "ERKSt6vectorINS0_5ValueESaIS3_EEPNS1_20SyncTensorCollectionE";

}  // namespace

GraphHashMend::GraphHashMend() : slot_("/_XLAC.", kRunPostOrder) {
  if (slot_) {
    Executor::stock = reinterpret_cast<Executor::RunPostOrder*>(slot_.get());
    slot_.set(reinterpret_cast<void*>(&Executor::run_post_order));
  }
}

GraphHashMend::~GraphHashMend() {
  if (slot_) {
    slot_.set(reinterpret_cast<void*>(Executor::stock));
  }
}

}  // namespace torch_convfix

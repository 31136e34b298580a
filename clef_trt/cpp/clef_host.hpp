// clef_trt inside a C++ program, through an embedded interpreter of Python (pybind11).
//
//     clef::Host host({"clef-flash.bundle", "/path/of/venv/bin/python", R"({"threads": 4})"});
//     std::string answer = host.decide(R"({"model": "clef-flash", "state": …, "questions": {…}})");
//
// The interpreter belongs to one thread of its own, which starts it, runs what was submitted, and ends it. It is
// started by the first host and then kept, since numpy cannot be loaded a second time in one process: hosts may be
// destroyed and made again as often as wanted, with one and the same Python. `clef::end_python()` ends it for good.
//
// A host may be used from any number of threads at once. `decide` runs on the thread that calls it; while a pass is
// inside the engine the interpreter's lock (GIL) is free, so the other threads' requests are read, encoded and answered
// meanwhile, and their passes run too. A thread that calls must not hold the GIL through other code of its own.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <condition_variable>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "clef_files.hpp"
#include "clef_interpreter.hpp"

namespace clef {

struct Question {
    std::string id, type;               // type: noul, choice or score
    std::vector<std::string> options;   // ids, in the order the model reads them
    std::vector<double> probabilities;  // of the options, not rounded
};

// One answered request.
struct Decision {
    std::vector<Question> questions;  // in the request's order
    std::int64_t input_tokens, truncated_state_tokens;
};

struct Settings {
    std::string bundle;
    std::string python;  // of an environment with clef_trt, of the version linked; empty: Python looks for it itself
    std::string load = "{}";  // JSON object of Clef.load's settings, such as {"threads": 4, "max_length": 4096}
};

// A bundle opened in this process. Members may be called from any thread; all but `submit` throw Error.
class Host {
public:
    // Starts Python at the first use in a process. Throws Error.
    explicit Host(const Settings& settings) {
        auto& interpreter = detail::Interpreter::instance();
        interpreter.enter(settings.python);
        try {
            embedded_ = detail::in_python([&] {
                namespace py = pybind11;
                const auto opened =
                    py::module_::import("clef_trt.embed").attr("Embedded")(settings.bundle, py::bytes(settings.load));
                return opened.inc_ref().ptr();
            });
        } catch (...) {
            interpreter.leave();
            throw;
        }
    }

    // Waits for what was submitted, then releases the engine. Calls on other threads must have returned.
    ~Host() {
        {
            std::unique_lock lock(mutex_);
            done_.wait(lock, [&] { return submitted_ == 0; });
        }
        try {
            detail::in_python([&] {
                const auto opened = pybind11::reinterpret_steal<pybind11::object>(embedded_);
                opened.attr("close")();
            });
        } catch (const Error&) {
            // Nobody is there to tell.
        }
        detail::Interpreter::instance().leave();
    }
    Host(const Host&) = delete;
    Host& operator=(const Host&) = delete;

    // The response body, JSON in UTF-8, to a request body; to an array of requests an array, in passes together.
    std::string decide(std::string_view request) const { return text("decide", request); }

    // The same on the interpreter's thread, one after the other; the future may throw what `decide` throws.
    std::future<std::string> submit(std::string request) const {
        auto task = std::make_shared<std::packaged_task<std::string()>>(
            [this, request = std::move(request)] { return decide(request); });
        auto result = task->get_future();
        {
            const std::lock_guard lock(mutex_);
            ++submitted_;
        }
        detail::Interpreter::instance().post([this, task] {
            (*task)();
            const std::lock_guard lock(mutex_);
            --submitted_;
            done_.notify_all();
        });
        return result;
    }

    // The answers to one request as numbers.
    Decision probabilities(std::string_view request) const {
        return detail::in_python([&] {
            using Row = std::tuple<std::string, std::string, std::vector<std::string>, std::vector<double>>;
            auto [rows, tokens, cut] =
                call("probabilities", request).cast<std::tuple<std::vector<Row>, std::int64_t, std::int64_t>>();
            Decision result{{}, tokens, cut};
            for (auto& [id, type, options, probabilities] : rows)
                result.questions.push_back(
                    {std::move(id), std::move(type), std::move(options), std::move(probabilities)});
            return result;
        });
    }

    // The tensors of a request, for `run` here or elsewhere.
    TensorFile encode(std::string_view request) const {
        const std::string file = text("encode", request);
        Bytes bytes(file.size());
        file.copy(bytes.data(), file.size());
        return parse_safetensors(std::move(bytes), "the encoded request");
    }

    // One pass over prepared tensors, in any order. They are read where they are, and only during the call.
    Logits run(const std::vector<Tensor>& inputs) const {
        const Tensor& options = find(inputs, "option_questions");
        if (options.shape.size() != 2) throw Error(Kind::engine, "option_questions has not two axes");
        Logits result{options.shape[0], options.shape[1], std::vector<float>(options.count())};
        run(inputs, result.values.data());
        return result;
    }

    // The same into the caller's memory: batch × options numbers, written in place.
    void run(const std::vector<Tensor>& inputs, float* logits) const {
        detail::in_python([&] {
            pybind11::dict arrays;
            for (const auto& tensor : inputs) arrays[pybind11::str(tensor.name)] = view(tensor);
            const Tensor output{"logits", Type::float32, find(inputs, "option_questions").shape, logits};
            pybind11::handle(embedded_).attr("run")(arrays, view(output));
        });
    }

    // What is loaded and in effect: a JSON object.
    std::string info() const {
        return detail::in_python([&] { return pybind11::handle(embedded_).attr("info")().cast<std::string>(); });
    }

private:
    PyObject* embedded_ = nullptr;
    mutable std::mutex mutex_;
    mutable std::condition_variable done_;
    mutable std::size_t submitted_ = 0;

    pybind11::object call(const char* method, std::string_view text) const {
        return pybind11::handle(embedded_).attr(method)(pybind11::bytes(text.data(), text.size()));
    }
    std::string text(const char* method, std::string_view request) const {
        return detail::in_python([&] { return call(method, request).cast<std::string>(); });
    }
    // An array over the tensor's memory: with an owner given, here None, pybind11 does not copy.
    static pybind11::array view(const Tensor& tensor) {
        const auto type =
            tensor.type == Type::int64 ? pybind11::dtype::of<std::int64_t>() : pybind11::dtype::of<float>();
        return pybind11::array(type, tensor.shape, tensor.data, pybind11::none());
    }
};

// Ends Python for good: its exit handlers run and its buffers are written. Optional, once all hosts are gone; a later
// host is refused. Throws Error(host) while there are hosts. Not from a task of the interpreter's thread.
inline void end_python() { detail::Interpreter::instance().end(); }

}  // namespace clef

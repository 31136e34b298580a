// The embedded interpreter of a process, and Python's exceptions as C++ ones.
#pragma once

#include <pybind11/embed.h>

#include <condition_variable>
#include <deque>
#include <filesystem>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "clef_common.hpp"

namespace clef {

// One thing that is wrong with a request.
struct Fault {
    std::string place;  // such as questions.urgency.criteria; empty for the whole request
    std::string message, kind;
};

// The request is wrong; `faults` holds everything that is.
class RequestError : public Error {
public:
    RequestError(const std::string& message, std::vector<Fault> all, Kind kind = Kind::request)
        : Error(kind, message), faults(std::move(all)) {}
    std::vector<Fault> faults;
};

// The request needs more tokens than the limit.
class TooLongError : public RequestError {
public:
    TooLongError(const std::string& message, std::vector<Fault> all, std::int64_t needed, std::int64_t limit)
        : RequestError(message, std::move(all), Kind::too_long), needed_tokens(needed), limit_tokens(limit) {}
    std::int64_t needed_tokens, limit_tokens;
};

namespace detail {

namespace py = pybind11;

[[noreturn]] inline void throw_translated(const py::error_already_set& error) {
    const py::handle value = error.value();
    py::object ours;
    try {
        ours = py::module_::import("clef_trt");
    } catch (const py::error_already_set&) {
        throw Error(Kind::host, "Python " PY_VERSION
                                ", which this program is built for, cannot import clef_trt; name the "
                                "python of an environment of that version: " +
                                    std::string(error.what()));
    }
    const auto is = [&](const char* name) { return py::isinstance(value, ours.attr(name)); };
    const auto message = [&] { return py::str(value).cast<std::string>(); };
    if (is("RequestError")) {
        std::vector<Fault> faults;
        for (const py::handle fault : value.attr("faults")) {
            std::string place;
            for (const py::handle part : fault.attr("loc"))
                place += (place.empty() ? "" : ".") + py::str(part).cast<std::string>();
            faults.push_back(
                {place, fault.attr("message").cast<std::string>(), fault.attr("kind").cast<std::string>()});
        }
        if (!is("TooLongError")) throw RequestError(message(), std::move(faults));
        throw TooLongError(message(), std::move(faults), value.attr("needed_tokens").cast<std::int64_t>(),
                           value.attr("limit_tokens").cast<std::int64_t>());
    }
    if (is("BundleError")) throw Error(Kind::bundle, message());
    if (is("EngineError")) throw Error(Kind::engine, message());
    if (is("SettingError")) throw Error(Kind::setting, message());
    if (is("MissingExtraError")) throw Error(Kind::missing_extra, message());
    throw Error(Kind::python, error.what());
}

// Runs `work` with the GIL held; Python's exceptions leave as Error.
template <typename Work>
auto in_python(const Work& work) {
    const py::gil_scoped_acquire held;
    try {
        return work();
    } catch (const py::error_already_set& error) {
        throw_translated(error);
    } catch (const py::builtin_exception& error) {
        throw Error(Kind::python, error.what());
    }
}

// The interpreter of this process and its thread.
class Interpreter {
public:
    // Never destroyed: a program may end, and run the destructors of its statics, without having ended Python.
    static Interpreter& instance() {
        static auto* const only = new Interpreter;
        return *only;
    }

    // Registers a host, with Python running. Throws Error(host) where that is not possible (any more).
    void enter(const std::string& python) {
        std::unique_lock lock(mutex_);
        if (state_ == State::none) {
            check_startable(python);
            python_ = python;
            thread_ = std::thread(&Interpreter::live, this);
            state_ = State::starting;
        }
        changed_.wait(lock, [&] { return state_ != State::starting; });
        if (state_ == State::ended)
            throw Error(Kind::host, "end_python() was called: this process can have no host any more");
        if (state_ == State::failed) throw Error(Kind::host, "Python could not be started: " + failure_);
        if (python != python_)
            throw Error(Kind::host,
                        "Python was started as '" + python_ + "', a process has only one; not as '" + python + "'");
        ++hosts_;
    }

    void leave() {
        const std::lock_guard lock(mutex_);
        --hosts_;
    }

    // Runs `task` on the interpreter's thread, with the GIL held, after those posted before.
    void post(std::function<void()> task) {
        const std::lock_guard lock(mutex_);
        tasks_.push_back(std::move(task));
        changed_.notify_all();
    }

    void end() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return state_ != State::starting; });
        if (hosts_ != 0)
            throw Error(Kind::host, std::to_string(hosts_) + " hosts still exist: destroy them before end_python()");
        state_ = State::ended;
        changed_.notify_all();
        std::thread thread = std::move(thread_);
        lock.unlock();
        if (thread.joinable()) thread.join();
    }

private:
    enum class State { none, starting, running, failed, ended };
    std::mutex mutex_;
    std::condition_variable changed_;
    State state_ = State::none;
    std::string python_, failure_;
    std::thread thread_;
    std::deque<std::function<void()>> tasks_;
    std::size_t hosts_ = 0;

    static void check_startable(const std::string& python) {
        if (Py_IsInitialized() != 0)
            throw Error(Kind::host,
                        "this process runs an interpreter that is not the host's: it must start Python itself");
        if (!python.empty() && !std::filesystem::exists(python))
            throw Error(Kind::host, python + " does not exist; expected the python of an environment with clef_trt");
    }

    void live() {
        std::string failure;
        try {
            start();
        } catch (const std::exception& error) {
            failure = error.what();
        }
        std::unique_lock lock(mutex_);
        failure_ = failure;
        state_ = failure.empty() ? State::running : State::failed;
        changed_.notify_all();
        if (!failure.empty()) return;
        lock.unlock();
        {
            const py::gil_scoped_release released;
            while (const auto task = next()) {
                const py::gil_scoped_acquire held;
                task();
            }
        }
        py::finalize_interpreter();
    }

    void start() const {
        // The program's locale stays as it is; file names are UTF-8 whatever it says.
        PyPreConfig before;
        PyPreConfig_InitPythonConfig(&before);
        before.parse_argv = before.configure_locale = before.coerce_c_locale = 0;
        before.utf8_mode = 1;
        const PyStatus prepared = Py_PreInitialize(&before);
        if (PyStatus_Exception(prepared) != 0)
            throw Error(Kind::host, prepared.err_msg == nullptr ? "its preparation" : prepared.err_msg);
        PyConfig config;
        PyConfig_InitPythonConfig(&config);
        config.parse_argv = 0;
        // Signals and the C library's streams are the program's; what it has read ahead would be lost.
        config.install_signal_handlers = config.configure_c_stdio = 0;
        if (!python_.empty()) {
            // From its program Python finds the environment's packages.
            const PyStatus status = PyConfig_SetBytesString(&config, &config.program_name, python_.c_str());
            if (PyStatus_Exception(status) != 0) {
                PyConfig_Clear(&config);
                throw Error(Kind::host, status.err_msg == nullptr ? "the name of its program" : status.err_msg);
            }
        }
        py::initialize_interpreter(&config, 0, nullptr, false);
    }

    std::function<void()> next() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return !tasks_.empty() || state_ == State::ended; });
        if (tasks_.empty()) return {};
        auto task = std::move(tasks_.front());
        tasks_.pop_front();
        return task;
    }
};

}  // namespace detail

}  // namespace clef
